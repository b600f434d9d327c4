"""A store in a folder: what its bytes mean (`format`), reading (`read`) and writing (`write`)."""
