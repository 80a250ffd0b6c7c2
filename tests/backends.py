"""The two backends as a pytest parameter: the CUDA one is marked `gpu`."""

import pytest

BACKENDS = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]
