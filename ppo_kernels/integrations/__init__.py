"""The ops under the names and signatures of other projects; nothing is patched on import."""
