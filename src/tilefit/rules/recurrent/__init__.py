"""RNN: recurrent layers off their fast algorithm."""
