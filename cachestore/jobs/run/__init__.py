"""One worker's part of a pass: claiming, encoding, and comparing what is wanted with what is there."""
