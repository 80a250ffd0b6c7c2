"""FuxiCTR's model zoo as functions of its parameters: each reads like its paper, on shared layers."""
