-- Upgrade what a gateway of commit 3c1fad8 has counted. It stored the costs of days and months in units of the currency (dc, odc, mc, omc).
-- It has counted everything, so nothing must be added to its counts (restore.lua).
--
-- KEYS: the hash of each holder.
for _, key in ipairs(KEYS) do
  for _, period in ipairs({'d', 'od', 'm', 'om'}) do
    local cost = redis.call('HGET', key, period .. 'c')
    if cost then
      redis.call('HSET', key, period .. 'n', string.format('%.0f', tonumber(cost) * 1000000000), 'e', 'all')
      redis.call('HDEL', key, period .. 'c')
    end
  end
end
return 'OK'
