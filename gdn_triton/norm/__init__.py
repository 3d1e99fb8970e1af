"""The gated norm after the gated delta rule: each head is divided by its root mean square."""
