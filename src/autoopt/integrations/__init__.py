"""Callbacks and factories for training frameworks; each module is imported only by those who use its framework."""
