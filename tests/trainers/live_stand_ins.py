"""Arms this process for an adapter, with stand-ins of the trainer's modules, until a test ends."""

import contextlib
import glob
import importlib.util
import os
import sys

import safetensors.torch

import cachestore as cs
from cachestore.live import arming, run

NAME = "trainer/files"
_REPLACED = (
    *((os.path, name) for name in ("exists", "isfile")),
    *((os, name) for name in ("remove", "unlink", "makedirs")),
    (glob, "glob"),
    *((safetensors.torch, name) for name in ("load_file", "save_file")),
)


class Armed:
    """This process, armed."""

    def __init__(self, module, store, hooks):
        self.module, self.store, self.hooks = module, store, hooks

    def plug(self):
        """Put in what is replaced in modules that are there already."""
        for module in (os, glob, safetensors.torch):
            self.module.adapter.plug_into(module)

    def counts(self):
        """How many values were reused and encoded, by part."""
        return run.current().counts

    def rows(self, name=NAME):
        """Return the names of the rows of a data set."""
        with cs.open(self.store) as store:
            return list(store.dataset(name).ids)


@contextlib.contextmanager
def armed_here(monkeypatch, folder, module, sources):
    """Arm this process with the adapter of a module of ours; `sources` are the trainer's modules, by path."""
    for name, text in sources.items():
        (folder / "trainer" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "trainer" / name).write_text(text)
    roots = {name.split("/")[0].removesuffix(".py") for name in sources}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder / "trainer")
        for holder, name in _REPLACED:
            patch.setattr(holder, name, getattr(holder, name))  # so that it is put back
        hooks = []
        patch.setattr(sys, "addaudithook", hooks.append)
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.loader is not None
        adapter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adapter)
        setting = arming.Setting(module, str(folder / "store"), NAME)
        patch.setattr(arming, "_armed", [(setting, adapter.adapter)])
        patch.setattr(run, "_runs", [])
        patch.setattr(sys, "meta_path", [arming._Hook(adapter.adapter, says=False), *sys.meta_path])
        armed = Armed(adapter, folder / "store", hooks)
        armed.plug()
        try:
            yield armed
        finally:
            if hasattr(adapter, "files"):
                adapter.files.close()
            for name in [name for name in sys.modules if name.split(".")[0] in roots]:
                del sys.modules[name]
