"""Tars in the form of webdataset, which are no trainer's: they hold a whole data set."""
