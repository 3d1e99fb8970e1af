"""`python -m gdn_triton [paths...]`: see `gdn_triton.demo`."""

from gdn_triton.demo import main

if __name__ == "__main__":
    raise SystemExit(main())
