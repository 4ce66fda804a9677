"""One file per model family. To add one: register an Adapter that names its attention classes, give it a tiny
configuration, and the tests take it up. A version whose attention class is not on transformers' AttentionInterface
needs `replacements`: the smallest methods to set on the instance, with projections called as modules.
"""
