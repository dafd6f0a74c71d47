"""Who answers a program's calls: an engine in this process, a server, OpenAI's API, or a script."""
