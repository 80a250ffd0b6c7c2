"""A lane's state, as the lookup leaves it for the kernels behind it."""

import torch

from kernels.runtime.state import STATE_WORDS, StateWord


def lane_state(rows: int, device: str | torch.device, *, batch_number: int = 7, generation: int = 0) -> torch.Tensor:
    """int32[STATE_WORDS] on the device."""
    words = [0] * STATE_WORDS
    words[StateWord.TRUE_ROWS], words[StateWord.BATCH_NUMBER], words[StateWord.GENERATION] = rows, batch_number, generation
    return torch.tensor(words, dtype=torch.int32, device=device)


def words_of_another_batch(count: int, device: str | torch.device) -> torch.Tensor:
    """int64[count] as kernels leave values for one another (awaited_values.cuh): not a number, of batch 5."""
    return torch.full((count,), 5 << 32 | 0x7FC00000, dtype=torch.int64, device=device)
