"""stub"""
import cachestore as cs
import numpy as np

def fill_with(store, *names, **options):
    return cs.fill(store, [(cs.key(name), name) for name in names], lambda batch: {key: {"value": np.zeros(1)} for key, _item in batch}, **options)
