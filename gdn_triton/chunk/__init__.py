"""The delta rule over whole sequences, chunk by chunk: training, and prefill on a pool."""
