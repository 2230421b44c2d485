"""Models: `loading.load` for every Hugging Face decoder, `lora` for adapters, `planted` for circuits built by hand.

A name, a folder or a model in memory goes in; a TransformerLens model comes out. `protocol.HookedModel` is the interface
that everything else requires of it.
"""
