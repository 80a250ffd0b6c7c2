"""Recurrences over a sequence: GRU and LSTM, all steps in one launch on a GPU and in one call of C on a CPU."""
