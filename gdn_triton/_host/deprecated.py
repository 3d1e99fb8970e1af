"""Arguments under their deprecated names."""

import warnings

import torch


def deprecated_state_layout(
    state_v_first: bool, transpose_state_layout: bool, *, frames: int = 1
) -> bool:
    """Returns the layout that was given under its old name. frames: the number of frames from here
    to the public function, whose caller the warning names."""
    if transpose_state_layout is not True and transpose_state_layout is not False:
        raise TypeError(
            "transpose_state_layout must be True, False or None, got "
            f"{type(transpose_state_layout).__name__}"
        )
    if state_v_first:
        raise ValueError(
            "transpose_state_layout must not be given with state_v_first=True, of which it is the "
            f"deprecated name, got {transpose_state_layout}"
        )
    message = "transpose_state_layout is deprecated: use state_v_first"
    if torch.compiler.is_compiling():
        from gdn_triton._host.traces import warn_deprecated

        warn_deprecated(message)
    else:
        warnings.warn(message, DeprecationWarning, stacklevel=2 + frames)
    return transpose_state_layout
