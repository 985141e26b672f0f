"""SYN, DAT, ANO, FOR, GRD: what the program around a step wastes."""
