"""Results: the record of each run, and the tables made from records. Imports no torch."""

from lapbench.results.record import Record, load_records, read_record, write_record
from lapbench.results.table import Table, leaderboard

__all__ = ["Record", "Table", "leaderboard", "load_records", "read_record", "write_record"]
