"""Long videos in bounded memory, compared with what a VAE makes of them at once."""

import pytest

from tests.encode import tiny_families

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("frames", [1, 9])
def test_attention_frame_by_frame_makes_what_a_mask_of_all_pairs_of_latent_pixels_makes(frames):
    import torch

    from cachestore.encode.pictures.causal import frame_by_frame

    torch.manual_seed(0)
    vae = tiny_families.hunyuan15_vae()
    clips = torch.randn(2, 3, frames, 16, 24)
    [block] = vae.encoder.mid_block.attentions
    own = block.prepare_causal_attention_mask
    with torch.inference_mode():
        whole = [vae.encode(clip[None]).latent_dist.parameters[0] for clip in clips]
        with frame_by_frame(vae):
            block.prepare_causal_attention_mask = lambda *_args, **_options: pytest.fail("the mask of all pairs was made")
            made = vae.encode(clips).latent_dist.parameters
        block.prepare_causal_attention_mask = own
        torch.testing.assert_close(made, torch.stack(whole), rtol=1e-4, atol=1e-5)
        assert torch.equal(vae.encode(clips[:1]).latent_dist.parameters[0], whole[0]), "the block's own forward is not back"


def test_other_vaes_are_left_alone():
    from cachestore.encode.pictures.causal import frame_by_frame

    vae = object()  # whatever is asked of it is an error
    with frame_by_frame(vae):
        pass
