"""The directory of one trained model: read, verified and written. No pickle; nothing in it is ever executed."""
