"""The processes that cachestore starts: a table of them, how one is started, and the wall around the one that reads pickles."""
