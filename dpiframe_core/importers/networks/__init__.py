"""Models as functions of a checkpoint's parameters, on shared layers, and the module that `compile` takes of one."""
