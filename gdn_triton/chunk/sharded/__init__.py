"""The chunked op with `cp_context`: sequences that are split over ranks."""
