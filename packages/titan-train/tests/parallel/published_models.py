"""Models of the transformers library behind a forward that returns logits."""

from torch import nn


class HFLlama(nn.Module):
    def __init__(self, vocab_size, tied=False):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.inner = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=tied,
                attn_implementation="sdpa",
            )
        )

    def forward(self, tokens, positions=None):
        return self.inner(tokens, position_ids=positions, use_cache=False).logits


class HFGPT2(nn.Module):
    def __init__(self, vocab_size):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.inner(tokens, use_cache=False).logits
