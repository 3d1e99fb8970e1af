"""Adapters for the calling conventions and hooks of other programs. A caller imports each adapter
by name; importing this package imports none."""
