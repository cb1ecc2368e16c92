"""The summation service: payloads of W workers in, one result out, for every key and step."""
