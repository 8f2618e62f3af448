"""The page: layout and events (app), its log records (records), its words (strings). Drawing is done by assets/."""
