"""Requests in every form that C reads, right, wrong and damaged, to C and to Python: they have to agree."""
