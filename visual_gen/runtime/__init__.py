"""Around a run: what it will cost, what it did, and the files that it leaves."""
