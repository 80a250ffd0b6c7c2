"""Operations on tensors of a module, written as nodes of a graph. Knows no trace and no raw input."""
