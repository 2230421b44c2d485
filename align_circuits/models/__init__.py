"""Models: `loading.load` for every Hugging Face decoder, `lora` for adapters, `planted` for circuits built by hand.

A name, a folder or a model in memory goes in; a TransformerLens model comes out, with the interface of
`hooks.hooked_model.HookedModel`, which is all that the other rooms require.
"""
