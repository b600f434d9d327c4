"""The vocabulary of the package: values and errors, without input or output."""
