"""The output of a model on a GPU (head.cu): linear over up to three parts, added logits, sigmoid. See `reference.head`."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.runtime.launch import WARP_ROWS, check_rows, launch, type_name
from kernels.runtime.source import kernel

MAX_PARTS, MAX_LOGITS = 3, 3


class Head:
    """Final weights, float32 on the device whatever the parts' dtype: weight[tasks, *], bias[tasks]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, x_dtype: torch.dtype, device: torch.device) -> None:
        self._weight, self._bias = (t.float().contiguous().to(device) for t in (weight, bias))
        self.tasks, self.width = weight.shape
        self._function = kernel("dense/head", "head", {"X": type_name(x_dtype), "TASKS": str(self.tasks)}, device.index or 0)

    def __call__(
        self,
        state: torch.Tensor,
        parts: Sequence[tuple[torch.Tensor, int, int]],
        logits: Sequence[torch.Tensor],
        rows: int,
        scores: torch.Tensor,
        done: torch.Tensor,
    ) -> None:
        """scores float32[rows, tasks] (pinned host or device memory) for the first state[TRUE_ROWS] rows.

        Args:
            state: int32[STATE_WORDS] on the device, see state.py.
            done: int32[>= rows / 8], pinned: gets the batch number (common.cuh, announce).
            parts: (tensor [>= rows, >= width], width, first column of the weight), at most 3.
            logits: float32[>= rows, 1 or tasks], at most 3.

        Raises:
            ValueError: too many operands, or one of a wrong layout.
        """
        if len(parts) > MAX_PARTS or len(logits) > MAX_LOGITS:
            raise ValueError(f"head: got {len(parts)} parts and {len(logits)} logits, expected <= {MAX_PARTS} and {MAX_LOGITS}")
        args: list[object] = [state.data_ptr()]
        for tensor, width, column in parts:
            check_rows("head part", tensor, rows, width)
            args += [tensor.data_ptr(), np.int32(width), np.int32(tensor.stride(0)), np.int32(column)]
        args += [0, np.int32(0), np.int32(0), np.int32(0)] * (MAX_PARTS - len(parts))
        for logit in logits:
            if logit.dtype != torch.float32 or logit.shape[1] not in (1, self.tasks) or not logit.is_contiguous():
                raise ValueError(f"head logits: got {logit.dtype}{tuple(logit.shape)}, expected float32[B, 1 or {self.tasks}]")
            args += [logit.data_ptr(), np.int32(0 if logit.shape[1] == 1 else self.tasks)]
        args += [0, np.int32(0)] * (MAX_LOGITS - len(logits))
        args += [
            self._weight.data_ptr(),
            np.int32(self._weight.stride(0)),
            self._bias.data_ptr(),
            scores.data_ptr(),
            done.data_ptr(),
        ]
        launch(self._function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, tuple(args))
