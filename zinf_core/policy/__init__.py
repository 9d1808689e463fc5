"""Pure decisions: no clock, file, thread, log or random source may be reached from here."""
