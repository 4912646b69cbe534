"""LSTM, GRU and RNN."""
