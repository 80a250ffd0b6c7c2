"""Blocks of a schema with one feature of the context, `user`, and one of the rows, `item`."""

import numpy as np

from dpiframe_core.features.row_block import RowBlock


def block_of(schema, users, items):
    """Rows of items, which take the users as their contexts in turns."""
    block = RowBlock.allocate(schema.block_layout, len(items), len(users))
    block.column(schema.columns["user"])[:, 0] = users
    block.column(schema.columns["item"])[:, 0] = items
    block.request_of_row[:] = np.arange(len(items)) % len(users)
    return block
