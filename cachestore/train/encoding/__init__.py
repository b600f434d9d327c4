"""Encoding what is missing while a training reads."""
