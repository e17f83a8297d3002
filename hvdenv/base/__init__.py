"""What everything else stands on: errors, strict decoding, processes, files, secrets, trust."""
