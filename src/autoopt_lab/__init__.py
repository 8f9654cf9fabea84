"""The laboratory: experiments with the library."""
