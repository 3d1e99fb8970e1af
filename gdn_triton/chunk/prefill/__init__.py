"""`gdn_triton.chunk_prefill`: whole sequences from and to a pool of states."""
