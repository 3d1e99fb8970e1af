"""The Triton backend of the chunked op: host code, and one file for each mathematical step, in
which the launcher follows its kernel."""
