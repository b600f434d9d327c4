"""Inputs to tensors: images, text, recipes of families. Opens no store file. Imports nothing by itself."""
