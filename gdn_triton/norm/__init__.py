"""The norm behind the gated delta rule: each head over its root mean square, gated."""
