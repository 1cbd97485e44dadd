"""This repository's pages out of its records: the README's and the docs' generated sections, docs/reproduction.md, figures."""
