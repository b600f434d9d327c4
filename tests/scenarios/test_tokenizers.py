"""Tokenizers are used, and their threads started, before a DataLoader forks."""

import pytest

from tests.scenarios.trainers import Hung, data_set, run_script
from tests.shares import share

pytestmark = pytest.mark.torch

TRAINER = """
import sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
import cachestore as cs

tokenizer = Tokenizer(WordLevel({"caption": 0, "[UNK]": 1}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
texts = ["caption of a picture"] * 1000
tokenizer.encode_batch(texts)


class Tokenizing:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        tokenizer.encode_batch(texts)
        return self.data[index]["sample_id"]


data = cs.CachedDataset(sys.argv[1])
if sys.argv[2] == "ours":
    batches = DataLoader(data, batch_size=4, collate_fn=data.collate, num_workers=2, multiprocessing_context="fork")
    print(sorted(name for batch in batches for name in batch["sample_id"]) == sorted(data.ids))
else:
    batches = DataLoader(Tokenizing(data), batch_size=4, num_workers=2, multiprocessing_context="fork")
    print(sorted(name for batch in batches for name in batch) == sorted(data.ids))
"""


@pytest.mark.parametrize("parallelism", share(["(unset)", "true"], 2))
def test_a_forking_loader_reads_after_tokenizers_were_used(tmp_path, parallelism):
    """FluxGym and sd-scripts: training stands still, or warns of a deadlock, once captions were tokenized before workers are forked."""
    store = data_set(tmp_path / "store")
    assert run_script(tmp_path, TRAINER, store, "ours", TOKENIZERS_PARALLELISM=parallelism) == "True\n"


@pytest.mark.slow
def test_a_data_set_that_tokenizes_in_forked_workers_does_stand_still(tmp_path):
    """What the test above is about does happen."""
    store = data_set(tmp_path / "store")
    with pytest.raises(Hung):
        run_script(tmp_path, TRAINER, store, "theirs", seconds=20, TOKENIZERS_PARALLELISM="true")
