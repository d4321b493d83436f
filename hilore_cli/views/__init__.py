"""What people read on the terminal: records become tables, by pure functions; nothing here reads files or measures."""

