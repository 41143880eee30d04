"""The task: conversational question answering with search. Imports layer 0 of ``verl`` and nothing else of ours."""
