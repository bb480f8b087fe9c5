-- Renew the leases of requests in flight. Without this the slots of a gateway that died would never be free again.
--
-- KEYS: leases. ARGV: the seconds of a lease, the time after which this is too late, then for each key the id of a request.
-- Returns the time in microseconds.
if now <= tonumber(ARGV[2]) then
  for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, now + tonumber(ARGV[1]), ARGV[i + 2])
    redis.call('EXPIRE', key, math.ceil(tonumber(ARGV[1])) + 1)
  end
end
return math.floor(now * 1000000)
