"""Copies between a store in a folder and one in an object store: push, pull and what `ls` shows of the latter."""
