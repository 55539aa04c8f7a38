"""What every command shares with the shell: `parser` reads its words, `boundary` turns errors into exit codes."""
