"""What commands share on a terminal: lines, bars, questions and signals."""
