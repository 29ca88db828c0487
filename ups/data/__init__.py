"""Readers, writer, download, doctor, tokenizer, cache and schedule."""
