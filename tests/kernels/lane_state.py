"""A lane's state, as the lookup leaves it for the kernels behind it."""

import torch

from kernels.runtime.state import STATE_WORDS, StateWord


def lane_state(rows: int, device: str | torch.device, *, batch_number: int = 7, generation: int = 0) -> torch.Tensor:
    """int32[STATE_WORDS] on the device."""
    words = [0] * STATE_WORDS
    words[StateWord.TRUE_ROWS], words[StateWord.BATCH_NUMBER], words[StateWord.GENERATION] = rows, batch_number, generation
    return torch.tensor(words, dtype=torch.int32, device=device)
